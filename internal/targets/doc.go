// Package targets dials a gRPC server at one of several addresses. The servers are replicas: any server
// that answers will do. The answer to a request says whether another server leads (Leader). The package
// knows no service; client, tools and servers use it.
package targets
