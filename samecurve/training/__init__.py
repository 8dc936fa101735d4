"""What the training loop works with. May import everything but bench and cli."""
