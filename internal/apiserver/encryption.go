package apiserver

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
)

// encryption is how each kind is written to etcd: in the clear, unless the
// configuration says otherwise.
type encryption struct {
	encryptionconfig.StaticTransformers
}

// loadEncryption reads the configuration of file, whose key services are
// talked to until ctx ends, and makes their health part of the server's.
func loadEncryption(ctx context.Context, file string, c *genericapiserver.Config) (*encryption, error) {
	if file == "" {
		return nil, nil
	}
	config, err := encryptionconfig.LoadEncryptionConfig(ctx, file, false, c.APIServerID)
	if err != nil {
		return nil, fmt.Errorf("--encryption-provider-config %s: %w", file, err)
	}
	c.AddHealthChecks(config.HealthChecks...)
	return &encryption{config.Transformers}, nil
}

// transformer is nil for kinds that are written in the clear.
func (e *encryption) transformer(gr schema.GroupResource) value.Transformer {
	if e == nil {
		return nil
	}
	return e.TransformerForResource(gr)
}
