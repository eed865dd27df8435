// Package platform differs from one platform to another.
package platform
