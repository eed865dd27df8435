// This package's comment begins as it likes.
package wrong
