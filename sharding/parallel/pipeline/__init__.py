"""Pipeline schedules as data: tables that are printed, proved and simulated before anything runs.

Read `actions`, `order`, `proof`, `simulation`, `chart`, `communication`, `torch_csv`, `schedule`,
`repeated_block` and `makers`, in this order.
"""
