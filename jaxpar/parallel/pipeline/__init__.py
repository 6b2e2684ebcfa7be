"""Pipeline parallelism: schedules as tables of tasks, built, checked, routed and drawn without JAX."""
