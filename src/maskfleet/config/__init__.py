"""What a run is: typed, frozen, resolved once. No torch, no cloud."""
