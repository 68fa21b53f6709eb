"""AWS Bedrock's `converse`."""
