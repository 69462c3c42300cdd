package accounts

import (
	"encoding/json"
	"net/http"
	"slices"

	jose "github.com/go-jose/go-jose/v4"
)

// Paths of the discovery documents.
const (
	ConfigurationPath = "/.well-known/openid-configuration"
	KeysPath          = "/openid/v1/jwks"
)

// Discovery returns the documents by path: the issuer's configuration and the keys
// that verify its tokens. base is the URL of this server for others.
func (i *Issuer) Discovery(base string) (map[string]http.Handler, error) {
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{}}
	var used []string
	for _, k := range i.public {
		id, err := keyID(k)
		if err != nil {
			return nil, err
		}
		key := jose.JSONWebKey{Key: k, KeyID: id, Use: "sig", Algorithm: string(algorithmOf(k))}
		set.Keys = append(set.Keys, key)
		if !slices.Contains(used, key.Algorithm) {
			used = append(used, key.Algorithm)
		}
	}
	keys, err := json.Marshal(set)
	if err != nil {
		return nil, err
	}
	configuration, err := json.Marshal(map[string]any{
		"issuer": i.Name, "jwks_uri": base + KeysPath,
		"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"},
		"id_token_signing_alg_values_supported": used,
	})
	if err != nil {
		return nil, err
	}
	return map[string]http.Handler{
		ConfigurationPath: document("application/json", configuration),
		KeysPath:          document("application/jwk-set+json", keys),
	}, nil
}

func document(kind string, body []byte) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET is answered here", http.StatusMethodNotAllowed)
			return
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "public, max-age=3600")
		_, _ = w.Write(body) // the client has gone, or not
	})
}
