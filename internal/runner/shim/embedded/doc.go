// Package embedded holds the program cmd/fairlead-shim, which needs a fraction of the
// memory that the whole of fairlead needs to do the same: there is one for each Pod.
//
// It is there in a build with the tag embed_shim, after cmd/fairlead-shim was built
// into this directory ('make build' does both). Without the tag, as after a plain
// 'go build ./...', the runner starts its own program as the shim.
package embedded
