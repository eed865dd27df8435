// Package cluster follows a topic from its creation to the delivery of messages through an operator's
// programs, started as internal/local starts them. The package contains only tests.
package cluster
