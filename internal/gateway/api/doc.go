// Package api has the client of the Gateway API, and the definitions of its kinds: the standard channel of the version that
// go.mod names.
package api
