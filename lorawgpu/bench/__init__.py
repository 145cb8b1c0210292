"""`lorawgpu bench`: how fast this device trains, by shape and by kind of product."""
