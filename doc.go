// Package fairlead is the root of the module; the binary is cmd/fairlead and the
// rooms are below internal/. See README.md and docs/flow.md.
package fairlead
