// Package web simulates web servers behind the gateway's pure packages, in virtual time:
// machines behind a balancer, as the JBQ paper measured them (web.go; cluster.go has its
// clusters and what had to be assumed of them), and a website of several resources behind
// a scheduler, the mQoS paper's (site.go). It is pure: the same study and seed give the
// same result.
package web
