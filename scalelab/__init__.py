"""ScaleLab: the library and command line behind the notebooks.

Layers, each importing only those below it: cli, panels, drills, grading, doctor, plan,
measure, runs, cluster. Importing this package costs nothing: no torch, no matplotlib.
"""

__version__ = "0.1.0"
