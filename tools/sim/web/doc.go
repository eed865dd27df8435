// Package web simulates web servers behind the gateway's pure packages, in virtual time.
// web.go and cluster.go have the balanced machines of the JBQ paper, and the assumptions
// about its clusters. site.go has the website of the mQoS paper, several resources behind
// a scheduler. The package is pure: the same study and seed give the same result.
package web
