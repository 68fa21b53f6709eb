"""The page that shows a run in a browser, during and after the run. It only reads the run directory."""
