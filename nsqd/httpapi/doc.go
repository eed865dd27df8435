// Package httpapi is nsqd's HTTP side: NSQ's API, SRTM's own additions to it,
// and what operators look at. Requests are checked here and carried out by the
// broker; what NSQ's tools expect of an answer is known here and nowhere else.
//
// api.go has the routes, access.go who may use them, publish.go and manage.go what changes something,
// stats.go and text.go what is looked at.
package httpapi
