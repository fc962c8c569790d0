"""What the suite is judged by and what it measures. The product imports nothing from here."""
