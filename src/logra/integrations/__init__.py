"""Other people's engines and frameworks, made to follow a policy. Each lives in a package of its own."""
