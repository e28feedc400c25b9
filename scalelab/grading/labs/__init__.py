"""The exercises of each lab: one module a lab, with a list EXERCISES."""
