// Package etcdtest runs a real etcd server with one member for a test, without TLS or
// with certificates and passwords. Only _test files import it.
package etcdtest
