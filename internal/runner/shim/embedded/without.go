//go:build !embed_shim

package embedded

// Program is the executable cmd/fairlead-shim: none in this build.
var Program []byte
