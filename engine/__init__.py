"""Evenhand's inference engine. Exports nothing: import the module you need, so that pure parts stay free of torch."""
