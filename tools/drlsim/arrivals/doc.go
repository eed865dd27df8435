// Package arrivals reads recorded arrival times, one per line. It knows the
// file's form and nothing of what the times are used for; read
// tools/drlsim/simulate next for that.
package arrivals
