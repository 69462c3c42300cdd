package backend

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
)

// encryption holds the encryption of each kind in etcd; a kind that the
// configuration does not name is not encrypted.
type encryption struct {
	encryptionconfig.StaticTransformers
}

// Encrypt reads the encryption of file, "" for none, and connects to its key services
// until ctx ends; their health becomes part of the server's.
func (b *Backend) Encrypt(ctx context.Context, file string, c *genericapiserver.Config) error {
	if file == "" {
		return nil
	}
	config, err := encryptionconfig.LoadEncryptionConfig(ctx, file, false, c.APIServerID)
	if err != nil {
		return fmt.Errorf("--encryption-provider-config %s: %w", file, err)
	}
	c.AddHealthChecks(config.HealthChecks...)
	b.encryption = &encryption{config.Transformers}
	return nil
}

// transformer returns the encryption of a kind, nil for none.
func (e *encryption) transformer(gr schema.GroupResource) value.Transformer {
	if e == nil {
		return nil
	}
	return e.TransformerForResource(gr)
}
