// Package etcdtest runs a real etcd server of one member for a test, in clear, or
// one that asks for certificates and passwords. Only _test files import it. It
// knows nothing of what is kept there: loaddistributor/store does.
package etcdtest
