// Package simulate judges a recorded trace by one contract, whole or split over
// several buckets. It computes on what it is given and does no I/O. The
// algorithms are the production's own: buckets are tokenbucket's, shares are
// divided by tbadaptor/share; what is here is only who goes to which bucket and
// how the delays are summed up.
package simulate
