"""Which paths of a network a table should have: their times and accuracies, predicted, and the best for each budget."""
