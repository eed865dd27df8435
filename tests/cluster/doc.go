// Package cluster follows a topic from its creation to the delivery of its messages
// through the programs that an operator starts, as internal/local starts them. It
// is all tests.
package cluster
