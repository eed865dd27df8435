// Command scale measures the control plane at size (make scale): a loaddistributor with
// its store in a file, a tbadaptor and brokers, all real, of as many topics as fit on the
// machine; and beyond, by drlsim scale, the packages that decide, without processes. It
// prints a page in Markdown.
package main
