"""The guided diffusion generator of architectures: what it reads, how it is trained, how it draws."""
