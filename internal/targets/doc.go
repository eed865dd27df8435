// Package targets dials gRPC servers that have several addresses and stand in
// for each other: one that answers will do. Whether it is the right one for a
// request is for the request's answer to say (Leader). It knows no service;
// client, tools and servers that need another one use it.
package targets
