// Command tool is right.
package main

func main() {}
