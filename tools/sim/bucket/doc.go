// Package bucket reads recorded arrivals and judges them by one contract, whole or
// split over several buckets: buckets are tokenbucket's, shares are divided by
// tbadaptor/share; what is here is only who goes to which bucket and how the delays
// are summed up. read.go has the file's form, assign.go who goes where.
package bucket
