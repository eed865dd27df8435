// Package web simulates web servers behind a balancer of gateway/balance, as the JBQ
// paper measured them, in virtual time. It is pure: the same study and seed give the
// same result. cluster.go has the paper's clusters and what had to be assumed of them.
package web
