// Package main is a command and should say so.
package main

func main() {}
