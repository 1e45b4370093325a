"""What runs on other machines before Shoal is installed: Python 3.7, standard library only."""
