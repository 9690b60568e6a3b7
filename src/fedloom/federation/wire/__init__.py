"""What both ends of the network share: messages as bytes, signatures, Flower."""
