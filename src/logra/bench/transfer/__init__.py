"""What has to travel to bring an engine to the next policy: the update at other shapes, and the alternatives to it."""
