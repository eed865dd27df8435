// Package httpapi is nsqd's HTTP side: publishing, the management of topics
// and channels, statistics in the shapes that NSQ's tools read, and what every
// SRTM daemon serves (metrics, profiles, state, health). It converts requests
// and answers; the decisions are nsqd/broker's.
package httpapi
