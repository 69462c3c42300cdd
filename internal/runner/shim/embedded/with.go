//go:build embed_shim

package embedded

import _ "embed"

// Program is the executable cmd/fairlead-shim.
//
//go:embed fairlead-shim
var Program []byte
