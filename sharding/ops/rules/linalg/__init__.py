"""Rules of matrix products, decompositions and transforms."""
