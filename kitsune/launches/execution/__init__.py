"""Issues recorded launches on a device: times them, races candidates, and proves that they do what the step does."""
