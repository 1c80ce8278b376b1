"""The engine that generates with torch inside of the actor process."""
