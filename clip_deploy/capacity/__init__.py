"""How much load a box carries, and how many boxes a load needs: a simulation of Triton on a measured curve."""
