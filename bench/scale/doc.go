// Command scale measures the control plane at size (make scale): a loaddistributor with
// its store in a file, a tbadaptor and brokers, all real, of as many topics as fit on the
// machine. It prints a page in Markdown. BenchmarkScale of loaddistributor/placement measures
// the packages that decide, without processes, at larger sizes.
package main
