// Package guest has the tests of package runner that need their own machine: a
// kernel with control groups of version 2, whose memory and processes a Pod may use
// up. See package internal/testbed/uml.
package guest
