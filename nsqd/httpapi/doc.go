// Package httpapi is nsqd's HTTP API: NSQ's API, SRTM's additions, and stats for operators. The
// package checks requests, and the broker carries them out. Only this package knows the answers
// that NSQ's tools expect.
//
// api.go has the routes, access.go the access checks, publish.go and manage.go the requests that
// change something, stats.go and text.go the stats.
package httpapi
