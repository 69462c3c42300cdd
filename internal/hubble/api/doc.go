// Package api holds Hubble's gRPC API in its packages: the messages of flows, the services Observer and Peer, and the states of nodes.
// Their code is that of the module github.com/cilium/cilium which test/hubble/go.mod names, with other import paths: the module itself
// would bring the requirements of all of Cilium.
package api

//go:generate go run ./generate
