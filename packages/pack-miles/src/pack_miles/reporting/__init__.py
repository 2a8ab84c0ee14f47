"""What people look at: forecasts, reports, pictures, pages."""
