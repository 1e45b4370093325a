"""Who holds parameters and who gets tickets."""
