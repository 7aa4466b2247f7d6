"""What each analysis says of its runs; how it is computed and drawn stands in the modules beside this folder."""
